{{- /* The container of a service: dict "root", "service", "values". Nothing of it can be written but its volumes. There is no
liveness probe: an unready service is no reason to restart one, and what hangs is ended by the watchdog in the image. */ -}}
{{- define "headrace.container" -}}
- name: {{ .service }}
  image: {{ include "headrace.image" . }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  ports: [{ name: {{ .service }}, containerPort: {{ include "headrace.port" . }} }]
  env:
    {{- include "headrace.environment" . | nindent 4 }}
  {{- with include "headrace.environmentSecrets" . }}
  envFrom:
    {{- . | trim | nindent 4 }}
  {{- end }}
  readinessProbe:
    httpGet: { path: /health, port: {{ .service }} }
    periodSeconds: 5
    timeoutSeconds: 3
    failureThreshold: 2
  {{- if eq .service "broker" }}
  restartPolicy: Always # a sidecar: there before the others start, and after they have stopped
  startupProbe:
    httpGet: { path: /health, port: broker }
    periodSeconds: 1
    timeoutSeconds: 3
    failureThreshold: 300
  {{- end }}
  {{- if eq .service "gateway" }}
  lifecycle: { preStop: { exec: { command: [sleep, {{ .values.drainS | toString | quote }}] } } }
  {{- end }}
  securityContext:
    allowPrivilegeEscalation: false
    readOnlyRootFilesystem: true
    capabilities: { drop: [ALL] }
  resources:
    {{- $resources := deepCopy .values.resources }}
    {{- with .values.gpus }}
    {{- $resources = mergeOverwrite $resources (dict "limits" (dict $.root.Values.gpuResource .)) }}
    {{- end }}
    {{- toYaml $resources | nindent 4 }}
  volumeMounts:
    {{- include "headrace.mounts" . | nindent 4 }}
{{- end }}

{{- define "headrace.environmentSecrets" -}}
{{- $names := .values.environmentSecrets | default list -}}
{{- if and .root.Values.blobs.credentialsSecret (not .root.Values.single.enabled) -}}
{{- $names = append $names .root.Values.blobs.credentialsSecret -}}
{{- end -}}
{{- range $names }}
- secretRef: { name: {{ . }} }
{{- end }}
{{- end }}

{{- /* What a service sees of the volumes of its Pod. All of `data_dir` can be written: a part that is no volume of its own
is scratch. */ -}}
{{- define "headrace.mounts" -}}
{{- $values := .root.Values -}}
- { name: settings, mountPath: /etc/headrace/headrace.toml, subPath: headrace.toml, readOnly: true }
- { name: tmp, mountPath: /tmp{{ if $values.single.enabled }}, subPath: {{ .service }}{{ end }} }
- { name: data, mountPath: /var/lib/headrace }
{{- if not $values.single.enabled }}
{{- if not $values.blobs.url }}
- { name: blobs, mountPath: /var/lib/headrace/blobs }
{{- end }}
{{- if has .service (list "gateway" "trainer") }}
- { name: own, mountPath: /var/lib/headrace/{{ .service }} }
{{- end }}
{{- end }}
{{- if or (include "headrace.onVllm" .) (include "headrace.onTrinity" .) }}
- { name: shared-memory, mountPath: /dev/shm }
{{- end }}
{{- if eq .service "gateway" }}
- { name: keys, mountPath: /etc/headrace/keys, readOnly: true }
{{- end }}
{{- if and (eq .service "trainer") $values.models.claim }}
- { name: models, mountPath: /models, readOnly: true }
{{- end }}
{{- if and (has .service (list "scorer" "registry" "judge")) (or $values.code.configMap $values.code.claim) }}
- { name: code, mountPath: /srv/code, readOnly: true }
{{- end }}
{{- end }}
