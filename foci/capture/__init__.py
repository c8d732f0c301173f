"""Any model to a Record: `watch`, and one file per ecosystem."""

from foci.capture.watch import watch

__all__ = ["watch"]
