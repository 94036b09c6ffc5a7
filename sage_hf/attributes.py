"""The attributes that sage_hf sets on objects of other libraries.

sage_hf also sets methods of diffusers' classes (`diffusers.models`); forward passes and RoPE functions in transformers'
modelling files, while a model runs our recipe (`transformers.rotary`); and VSA's gates in Wan's blocks, which are
modules with weights (`diffusers.gates`). It sets nothing else.
"""

CHANGES = "_sage_changes"
"""On models that `apply` or `enable_vsa` changed: the functions that undo each change (`changes`)."""
LAYER = "_sage_layer"
"""On diffusers' attention modules that a shared processor serves: (that processor, the module's `Layer`)."""
ORDER = "_sage_order"
"""On the rotary embeddings that Wan makes under VSA: the order of their tokens."""
SPLIT = "_sage_split"
"""On a diffusers model whose tokens our context-parallel plan splits, and on its attention modules: the split
(`diffusers.shards`)."""
RECIPE = "sage_recipe"
"""On transformers' attention modules, like the next three; set by `apply` or the user: the recipe."""
TRAINING = "sage_training"
"""Set by `apply` or the user: the recipe in training mode."""
FALLBACK = "sage_fallback"
"""Set by `apply` or the user: the fallback."""
IMPLEMENTATION = "sage_implementation"
"""Set by `apply`: the `attn_implementation` for which the previous three hold."""
CAUSALITY = "_sage_causality"
"""On causal masks that transformers makes: (a `transformers.masks.Causality`, the mask's version at that time)."""
