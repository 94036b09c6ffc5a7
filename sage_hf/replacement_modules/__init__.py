"""Modules that `sage_hf.drop_in` puts on the path under the names of SageAttention's packages."""
