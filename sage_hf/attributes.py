"""The attributes that sage_hf sets on objects of other libraries.

It sets no others, but for methods of diffusers' classes (`diffusers.models`), the forward passes and rotations in
transformers' modelling files while a model runs a recipe of ours (`transformers.rotary`), and VSA's gates in Wan's
blocks, which are modules with weights (`diffusers.gates`).

LAYER is set on diffusers' attention modules that a shared processor serves: (that processor, the module's `Layer`).
The others are set on attention modules of transformers. RECIPE, TRAINING and FALLBACK, which a user may set too, name
the recipe, the recipe in training mode and the fallback; IMPLEMENTATION is the `attn_implementation` they belong to.
SPLIT is set on diffusers' attention modules whose tokens are split among processes by a plan of ours, and on their
model: how they are split (`diffusers.shards`).
CHANGES is set on models that `apply` or `enable_vsa` changed: what undoes each change (`changes`).
ORDER is set on the rotary embeddings that Wan makes under VSA: the order of the tokens that they are for.
CAUSALITY is set on causal masks that transformers makes: (what it says, a `transformers.masks.Causality`; the mask's
version at that time).
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
