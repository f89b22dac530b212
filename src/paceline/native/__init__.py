"""The CPU kernels of `native/`, reached through ctypes. Without them everything runs in PyTorch."""
