# The service: docker build -t trope . && docker run -p 127.0.0.1:8000:8000 -v $PWD/runs:/runs -v trope-events:/events \
#   trope /runs/clicks --store /events/events.sqlite --api-key-file /runs/key
# For a CPU give torch's index of CPU builds, or the image holds several GB of CUDA (pytorch.org names the index):
#   docker build --build-arg TORCH_INDEX=.. -t trope .
FROM python:3.11-slim

RUN useradd --create-home trope && install -d -o trope /events
WORKDIR /opt/trope
COPY constraints.txt ./
ARG TORCH_INDEX=
# Before the source, so that a change of it does not download torch again.
RUN pip install --no-cache-dir -c constraints.txt ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch numpy
COPY pyproject.toml README.md LICENSE ./
COPY configs configs
COPY trope trope
RUN pip install --no-cache-dir -c constraints.txt '.[serve,redis]'

USER trope
EXPOSE 8000
HEALTHCHECK CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health')"]
# Inside a container every address is the container's own; publish the port where it should be reached.
ENTRYPOINT ["trope", "serve", "--host", "0.0.0.0"]
