"""The MLX engine: Metal, CUDA and CPU. mlx-lm gives the models; data path, loss, step and optimizer are ours."""
