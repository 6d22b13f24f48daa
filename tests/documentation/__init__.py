"""What the documentation says, held against the package."""

# These tests import every module of the package. BoTorch must have been imported by then in the way that changes nothing.
from tests import botorch_apart as botorch_apart
