"""What training costs in FLOPs and memory, before and while it runs."""
