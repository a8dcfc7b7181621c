"""What server and learners say to each other, and how bytes travel."""
