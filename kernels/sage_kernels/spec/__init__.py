"""An attention call: recipe, layout, operands, masks, and the checks of its arguments."""
