"""CaptureError, which a watched call raises if it cannot be recorded."""


class CaptureError(ValueError):
    """A call that cannot be recorded as requested; raised from within the watched model."""
