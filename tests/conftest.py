"""Four devices on the host, for tests that shard: XLA reads the flag when jax first counts devices, so before any test imports jax."""

import os

os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), "--xla_force_host_platform_device_count=4"]).strip()
