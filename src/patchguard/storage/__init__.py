"""What is kept on disk: model files, the zoo, presets and certificate files."""
