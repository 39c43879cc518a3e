"""What one ingress replica takes in at once, and from whom."""
