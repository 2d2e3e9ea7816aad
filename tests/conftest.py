"""For all tests: how Hypothesis draws.

`make test` draws the same examples each time, so that a change is held only to what it changes; `make explore` draws
others each time, and what it finds becomes a test of its own.
"""

import os

from hypothesis import HealthCheck, settings

# How long an example takes says nothing on a machine that others use too.
PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("steady", PATIENT, derandomize=True)
settings.register_profile("explore", PATIENT, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "steady"))
