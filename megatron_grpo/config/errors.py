"""The one exception for what a user can put right."""


class ConfigError(ValueError):
    """A wrong setting, file or combination. One line each: ``key=value: why; remedy``."""
