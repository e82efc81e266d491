"""What the registry knows of kernels/sm90: support surfaces as data, and adapters from roles to launch arguments.

Kept apart from the device code, so that a word changed in a hint leaves the measured sources, and the record of what
was measured on them, as they are.
"""
