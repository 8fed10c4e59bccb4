"""Choose the buckets of an image: resolutions and, within each, a square or one of several shapes.

A bucket is a folder of shards for the images of one resolution, or of one resolution and shape.
"""

from collections.abc import Sequence

from diffusion.config.image_shapes import STEP, Shape, parse_shape, sdxl_shapes, shape_for, square


class Buckets:
    """All buckets of a dataset; a name is `512px`, or `512px/640x384` with aspect-ratio buckets.

    Args:
        sizes: Resolutions in pixels.
        aspects: `none` for squares only, `sdxl` for the shapes of the SDXL table, or a list of shapes at the largest
            size, which are scaled for the other sizes.
        step: Divisor of the sides of all shapes, in pixels.
        every: True if an image goes to each resolution that it fills, False if only to the largest one.
    """

    def __init__(
        self, sizes: Sequence[int], aspects: str | Sequence[str], *, every: bool = True, step: int = STEP
    ) -> None:
        self.squares = aspects == 'none'
        self.every = every
        self.shapes = {size: _shapes(size, max(sizes), aspects, step) for size in sorted(sizes)}

    @property
    def names(self) -> list[str]:
        """Names of all buckets, sorted by resolution, then by aspect ratio from tall to wide."""
        return [self.name(size, shape) for size, shapes in self.shapes.items() for shape in shapes]

    @property
    def largest_side(self) -> int:
        """Longest side of all buckets in pixels; an image fits in each bucket if its shorter side has as many."""
        return max(max(shape.width, shape.height) for shapes in self.shapes.values() for shape in shapes)

    def name(self, size: int, shape: Shape) -> str:
        return f'{size}px' if self.squares else f'{size}px/{shape}'

    def choose(self, width: int, height: int) -> list[tuple[int, Shape]]:
        """Choose the buckets of an image of this width and height in pixels.

        They are all resolutions that need no upscaling, or the largest of them if not `every`; within each, the shape
        closest in aspect ratio.

        Returns:
            Pairs (resolution, shape) from small to large; empty if the image is smaller than every bucket.
        """
        filled = []
        for size, shapes in self.shapes.items():
            fitting = [shape for shape in shapes if shape.width <= width and shape.height <= height]
            if size <= min(width, height) and fitting:
                filled.append((size, shape_for(width, height, fitting)))
        return filled if self.every else filled[-1:]


def sizes_problem(sizes: Sequence[int], step: int = STEP) -> str | None:
    """Return an error message for resolutions that are not multiples of `step`, or None if they are valid."""
    wrong = [size for size in sizes if size <= 0 or size % step]
    if not sizes or wrong:
        return f'{wrong or "the list is empty"}; sizes must be positive multiples of {step}, in pixels'
    return f'{list(sizes)} contains a size twice; list each size once' if len(set(sizes)) != len(sizes) else None


def _shapes(size: int, largest: int, aspects: str | Sequence[str], step: int) -> list[Shape]:
    if aspects == 'none':
        return [square(size)]
    if aspects == 'sdxl':
        return sdxl_shapes(size, step)
    scaled = {_scaled(parse_shape(text), size, largest, step) for text in aspects}
    return sorted(scaled, key=lambda shape: (shape.aspect, shape.width))


def _scaled(shape: Shape, size: int, largest: int, step: int) -> Shape:
    return Shape(*(max(step, round(side * size / largest / step) * step) for side in (shape.width, shape.height)))
