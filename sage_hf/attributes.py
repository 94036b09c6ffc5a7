"""The attributes that sage_hf puts on modules of other libraries; it writes to nothing else of theirs.

LAYER, on attention modules of diffusers that a shared processor serves: (the processor, what the module computed).
RECIPE, TRAINING, FALLBACK and IMPLEMENTATION, on attention modules of transformers: the names of the recipe, of that in
training mode and of the fallback, which a user may set too, and the `attn_implementation` that they belong to.
"""

LAYER = "_sage_layer"
RECIPE = "sage_recipe"
TRAINING = "sage_training"
FALLBACK = "sage_fallback"
IMPLEMENTATION = "sage_implementation"
