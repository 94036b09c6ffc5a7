"""The attributes that sage_hf sets on modules of other libraries; it sets no others.

LAYER is set on diffusers' attention modules that a shared processor serves: (that processor, the module's `Layer`).
The others are set on attention modules of transformers. RECIPE, TRAINING and FALLBACK, which a user may set too, name
the recipe, the recipe in training mode and the fallback; IMPLEMENTATION is the `attn_implementation` they belong to.
"""

LAYER = "_sage_layer"
RECIPE = "sage_recipe"
TRAINING = "sage_training"
FALLBACK = "sage_fallback"
IMPLEMENTATION = "sage_implementation"
