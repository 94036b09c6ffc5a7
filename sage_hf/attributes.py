"""The attributes that sage_hf sets on objects of other libraries.

sage_hf also sets methods of diffusers' classes (`diffusers.models`); forward passes and RoPE functions in transformers'
modelling files, while a model runs our recipe (`transformers.rotary`); and VSA's gates in Wan's blocks, which are
modules with weights (`diffusers.gates`). It sets nothing else.

LAYER is set on diffusers' attention modules that a shared processor serves: (that processor, the module's `Layer`).
RECIPE, TRAINING, FALLBACK and IMPLEMENTATION are set on attention modules of transformers. The first three, which a
user may set too, name the recipe, the recipe in training mode and the fallback; IMPLEMENTATION is the
`attn_implementation` that they belong to. SPLIT is set on diffusers' attention modules whose tokens our plan splits
among processes, and on their model: it says how they are split (`diffusers.shards`). CHANGES is set on models that
`apply` or `enable_vsa` changed: it holds the functions that undo each change (`changes`). ORDER is set on the rotary
embeddings that Wan makes under VSA: it is the order of their tokens. CAUSALITY is set on causal masks that transformers
makes: (a `transformers.masks.Causality`, the mask's version at that time).
"""

CHANGES = "_sage_changes"
LAYER = "_sage_layer"
ORDER = "_sage_order"
SPLIT = "_sage_split"
RECIPE = "sage_recipe"
TRAINING = "sage_training"
FALLBACK = "sage_fallback"
IMPLEMENTATION = "sage_implementation"
CAUSALITY = "_sage_causality"
