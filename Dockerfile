# The service: docker build -t trope . && docker run -p 127.0.0.1:8000:8000 -v $PWD/runs:/runs -v trope-events:/events \
#   trope /runs/clicks --store /events/events.sqlite --api-key-file /runs/key
# A CPU image. For a GPU start from an image with CUDA and leave out the pinned torch.
FROM python:3.11-slim

RUN useradd --create-home trope && install -d -o trope /events
WORKDIR /opt/trope
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY configs configs
COPY trope trope
RUN pip install --no-cache-dir -c constraints.txt torch numpy \
    && pip install --no-cache-dir -c constraints.txt '.[serve,redis]'

USER trope
EXPOSE 8000
HEALTHCHECK CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health')"]
# Inside a container every address is the container's own; publish the port where it should be reached.
ENTRYPOINT ["trope", "serve", "--host", "0.0.0.0"]
