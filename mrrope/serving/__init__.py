"""What any inference engine needs to serve mrrope's rope types; the plugins of the engines hold hooks and refusals."""
