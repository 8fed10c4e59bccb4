"""Private names of other packages, and differences between their versions."""

from diffusion.compatibility.version_bounds import check_bounds

check_bounds()
