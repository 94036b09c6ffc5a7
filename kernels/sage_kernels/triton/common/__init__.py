"""Code shared by Triton kernels: launches, device functions, operands of gradients."""
