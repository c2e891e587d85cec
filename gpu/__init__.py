"""The engine-thread side: model, KV cache, sampler. It never sees asyncio or HTTP. It runs on CPU as well."""

import os

# libgomp reads it when torch is loaded: threads that wait in a spin take the core from the event loop. A linear went
# from 1,902 to 395 µs so with the cores oversubscribed.
os.environ.setdefault("GOMP_SPINCOUNT", "0")
