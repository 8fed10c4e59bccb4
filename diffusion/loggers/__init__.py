"""Logger destinations in addition to Composer's."""
