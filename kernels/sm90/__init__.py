"""Our CuTe DSL kernels for Hopper. Where to find what:

    forward, grouped GEMM + GLU      grouped_gemm_glu.py, the kernel; glu_*.py: config (what is legal), tune (which
                                     schedule), arguments, host (launch), entry (what is compiled), operands, epilogue,
                                     math, stores
    backward, grouped GEMM + dGLU    grouped_gemm_dglu.py, the kernel; config, tune, arguments, host, entry, operands,
                                     epilogue, epilogue_math, stores, as the forward's; quantizer (MXFP8 codes),
                                     padding (scales of no row), reductions (dprob, dbias, amax)
    both                             config (Schedule, Activation, limits) and arguments (what a launch passes), from
                                     which the forward's import; roles (barriers, the computing warps' loop), mainloop,
                                     scheduler, records (of tiles), experts (descriptors of separate weights),
                                     primitives (PTX), views, compiling, launching
    zeros that grouped_mm leaves out uncovered.py
    from tokens to rows and back     route_choices.py (the row of each choice) and token_rows.py (copies, sums);
                                     routing_config

`illegal`, `schedule_for` and the arguments import neither torch nor the DSL; NOTES.md has what was measured.
"""
