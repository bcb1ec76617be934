"""The one error of this package."""


class ModelError(ValueError):
    """A model that cannot be found, read or computed. The message names the file and the tensor or field,
    and says what to do."""
