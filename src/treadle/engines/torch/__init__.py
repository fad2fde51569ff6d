"""`TorchEngine`: the embedded engine, continuous batching over a Hugging Face model with a KV cache of its own."""
