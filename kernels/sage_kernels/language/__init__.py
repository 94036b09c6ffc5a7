"""What kernels in Triton's languages, Triton and Gluon, share: launches, device functions, operands of gradients."""
