"""The bucket of an image: a resolution, and in it a square or one of several aspects."""

from collections.abc import Sequence

from diffusion.config.image_shapes import STEP, Shape, parse_shape, sdxl_shapes, shape_for, square


class Buckets:
    """The buckets of a preparation by name: `512px`, or `512px/640x384` where there are aspects.

    Args:
        sizes: Resolutions in pixels.
        aspects: `none` for squares alone, `sdxl` for the shapes of its table, or shapes of the largest of the sizes;
            for the others they are scaled.
    """

    def __init__(self, sizes: Sequence[int], aspects: str | Sequence[str]) -> None:
        self.squares = aspects == 'none'
        self.shapes = {size: _shapes(size, max(sizes), aspects) for size in sorted(sizes)}

    @property
    def names(self) -> list[str]:
        """All buckets by resolution, the smallest first, then by aspect, the tallest first."""
        return [self.name(size, shape) for size, shapes in self.shapes.items() for shape in shapes]

    def name(self, size: int, shape: Shape) -> str:
        return f'{size}px' if self.squares else f'{size}px/{shape}'

    def of(self, width: int, height: int) -> tuple[int, Shape] | None:
        """Return the largest resolution with a shape that needs no enlarging, and there the nearest shape in aspect.

        None for an image that is too small for all.
        """
        for size in sorted(self.shapes, reverse=True):
            fitting = [shape for shape in self.shapes[size] if shape.width <= width and shape.height <= height]
            if size <= min(width, height) and fitting:
                return size, shape_for(width, height, fitting)
        return None


def sizes_problem(sizes: Sequence[int]) -> str | None:
    """Return the mistake in a list of resolutions, or None."""
    wrong = [size for size in sizes if size <= 0 or size % STEP]
    if not sizes or wrong:
        return f'{wrong or "none"} given; sizes are positive multiples of {STEP}, in pixels'
    return f'{list(sizes)} repeats a size; name each once' if len(set(sizes)) != len(sizes) else None


def _shapes(size: int, largest: int, aspects: str | Sequence[str]) -> list[Shape]:
    if aspects == 'none':
        return [square(size)]
    if aspects == 'sdxl':
        return sdxl_shapes(size)
    scaled = {_scaled(parse_shape(text), size, largest) for text in aspects}
    return sorted(scaled, key=lambda shape: (shape.aspect, shape.width))


def _scaled(shape: Shape, size: int, largest: int) -> Shape:
    return Shape(*(max(STEP, round(side * size / largest / STEP) * STEP) for side in (shape.width, shape.height)))
