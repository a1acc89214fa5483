"""Cases of the delta rule and what their outputs must be, for every engine: on a CPU today, for kernels on a GPU.

``recurrence`` is the definition in numpy fp64, ``cases`` the inputs, ``running`` runs a case on an engine and compares,
``properties`` are invariants over several runs.
"""
