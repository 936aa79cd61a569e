"""GPU kernels, imported as `residualquant.kernels`: one file per operation, reference beside kernel.

Nothing here imports Triton or CUDA; importing the module of an operation imports Triton.
"""
