"""Private names of other packages, and differences between their versions."""

from diffusion.compatibility.diffusers_bounds import check_diffusers

check_diffusers()
