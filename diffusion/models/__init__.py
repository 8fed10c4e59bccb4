"""Models: the parts, the objective, and the ComposerModel that binds them."""
