"""The machine and its libraries: compilers, folders, and other packages' imports."""
