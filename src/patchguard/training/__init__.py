"""Training: losses that look at the certificate, recipes with every number, and the one loop that runs them."""
