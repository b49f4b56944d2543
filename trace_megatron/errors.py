"""The one error a user may meet: what was expected, what was found, what to do."""


class UserError(Exception):
    """A mistake in the user's input. The command line prints its one sentence and exits with code 2."""


class WeightSyncError(Exception):
    """The engine does not hold the trainer's weights, or an update ended half-way. The run stops."""


class RolloutError(Exception):
    """More of a step's rollouts failed than the configuration allows. The run stops."""


class ColocationError(Exception):
    """Trainer and engines, which share devices, could not change places. The run stops."""
