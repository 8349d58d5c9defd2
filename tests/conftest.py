"""What holds for all tests: a property is checked however slow the machine is at the moment."""

from hypothesis import HealthCheck, settings

# Other tests and their processes run beside each example, so how long one takes says nothing about what it tries.
settings.register_profile("whatever the load", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("whatever the load")
