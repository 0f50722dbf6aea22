"""The processes and devices of a job: how they meet, the mesh that they form, and who notices that one is gone."""
