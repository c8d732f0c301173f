"""The commands that train and use models: each file has `add`, which names the options, and `run`."""
