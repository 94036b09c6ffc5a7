"""Low-bit attention for transformers models: `attn_implementation="sage3"` and its siblings.

Importing this package does not import transformers; `register` waits for it.
"""

from sage_hf.transformers.layers import attention_layers, unsupported
from sage_hf.transformers.registration import register

__all__ = ["attention_layers", "register", "unsupported"]
