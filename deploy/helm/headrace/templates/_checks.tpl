{{- /* What a schema cannot say: values that do not go together. Each message names the value and the remedy. */ -}}
{{- define "headrace.checks" -}}
{{- $single := .Values.single.enabled -}}
{{- if and (not $single) (not .Values.bus.address) -}}
{{- fail "bus.address is empty: name your Kafka (host:port), or set single.enabled for the embedded broker" -}}
{{- end -}}
{{- if and $single .Values.bus.address -}}
{{- fail "bus.address is set and single.enabled too: a single Pod has the embedded broker; set single.enabled to false" -}}
{{- end -}}
{{- if and (not $single) (not .Values.database.urlSecret.name) -}}
{{- fail "database.urlSecret.name is empty: name a Secret with the URL of your PostgreSQL, or set single.enabled for SQLite" -}}
{{- end -}}
{{- if and $single .Values.database.urlSecret.name -}}
{{- fail "database.urlSecret.name is set and single.enabled too: a single Pod has SQLite; set single.enabled to false" -}}
{{- end -}}
{{- if and $single (gt (len .Values.trainers) 1) -}}
{{- fail "trainers has several lineages: a single Pod runs one; set single.enabled to false" -}}
{{- end -}}
{{- if .Values.judge.enabled -}}
{{- range $name := list "baseUrl" "model" -}}
{{- if not (get $.Values.judge.endpoint $name) -}}
{{- fail (printf "judge.endpoint.%s is empty: say whom the judge asks, or set judge.enabled to false" $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and .Values.code.configMap .Values.code.claim -}}
{{- fail "code.configMap and code.claim are both set: the folder comes from one of them" -}}
{{- end -}}
{{- if and (eq .Values.inference.engine "vllm") (not .Values.inference.gpus) -}}
{{- fail "inference.engine is \"vllm\" and inference.gpus is 0: the image headrace-inference-vllm computes on GPUs; set inference.gpus, or engine to \"torch\"" -}}
{{- end -}}
{{- $lineages := dict -}}
{{- range $name, $trainer := .Values.trainers -}}
{{- if and (eq ($trainer.backend | default "torch") "trinity") (not $trainer.gpus) -}}
{{- fail (printf "trainers.%s.backend is \"trinity\" and its gpus are 0: Trinity computes on GPUs; set gpus, or backend to \"torch\"" $name) -}}
{{- end -}}
{{- if hasKey $lineages $trainer.lineage -}}
{{- fail (printf "trainers.%s.lineage is %q, as is that of trainers.%s: a lineage has one owner" $name $trainer.lineage (get $lineages $trainer.lineage)) -}}
{{- end -}}
{{- $_ := set $lineages $trainer.lineage $name -}}
{{- end -}}
{{- if and .Values.console.enabled (not (dig "console" "users" list (fromToml .Values.settings))) -}}
{{- fail "console.enabled is true and settings has no console.users: list at least one user with the SHA-256 of a token, or set console.enabled to false" -}}
{{- end -}}
{{- include "headrace.noSecrets" . -}}
{{- end }}

{{- define "headrace.noSecrets" -}}
{{- $settings := fromToml .Values.settings -}}
{{- with $settings.Error }}{{ fail (printf "settings is not valid TOML: %s" .) }}{{ end -}}
{{- $found := dict
  "security.internal_key" (dig "security" "internal_key" "" $settings)
  "judge.endpoint.api_key" (dig "judge" "endpoint" "api_key" "" $settings)
  "database.url" (dig "database" "url" "" $settings) -}}
{{- range $name, $value := $found -}}
{{- if $value -}}
{{- fail (printf "settings has %s: a ConfigMap is no place for it; see internalKeySecret, judge.endpoint.apiKeySecret and database.urlSecret" $name) -}}
{{- end -}}
{{- end -}}
{{- end }}
