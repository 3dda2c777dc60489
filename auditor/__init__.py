"""Make a registered image model explain itself, measure the explanations, and gate releases on them."""
