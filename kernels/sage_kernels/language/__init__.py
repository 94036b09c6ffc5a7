"""Code shared by kernels in Triton and Gluon: launches, device functions, operands of gradients."""
