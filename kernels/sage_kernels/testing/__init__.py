"""Tools of the tests: compiling ahead of time, and reading machine code."""
