"""Starts Ray and Serve on one machine: settings of Ray, and HAProxy in the place of the proxy of Serve."""
