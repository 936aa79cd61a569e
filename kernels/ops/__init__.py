"""GPU kernels, imported as `residualquant.kernels`: one file per operation, reference beside kernel.

Nothing here imports Triton or CUDA at import time.
"""
