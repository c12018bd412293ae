"""The trio shell round wire/: transports, the secure stream, peers with requests and handlers, dialling and serving."""
