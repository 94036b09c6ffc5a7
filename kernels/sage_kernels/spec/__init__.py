"""What an attention call is: recipe, layout, operands, masks, and the checks of its arguments."""
