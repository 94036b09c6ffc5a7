"""The machine and the libraries around: compilers, folders, and other packages' imports."""
