"""The engine-thread side: model, KV cache, sampler. It never sees asyncio or HTTP. It runs on CPU as well."""
