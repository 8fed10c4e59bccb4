"""Exception by which an input is rejected with a reason."""


class Unfit(Exception):
    """Raised to reject an input; the message is the reason in snake case, such as `too_small`."""

    def __init__(self, reason: str, detail: str = '') -> None:
        super().__init__(reason)
        self.detail = detail
        """Explanation of the reason with the values found."""
